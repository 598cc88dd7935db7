"""Operations on a ledger as a whole: delete it, repair it, compare and check its replicas."""
