"""Operations on a ledger as a whole: delete, repair, and comparing its replicas."""
