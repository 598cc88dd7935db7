"""Planted bugs of the metadata stores themselves, which the simulator's store stands in for."""

from __future__ import annotations

from tests.sim.mutants.planting import Edit, Mutant

_DATABASE = "metadata.backends.sqlite.database:Database"
_MEND = "metadata.backends.sqlite.store:_mend_registrations"
_SESSION = "metadata.backends.zookeeper.session:Session"
_REPLACED = "tests/metadata/test_sqlite_replaced.py"
_NOTE = "the simulator's store is its own"

MUTANTS = [
    Mutant(
        480, "a key is missing by the word of a file that the path names no more",
        (Edit(f"{_DATABASE}.run",
              "except Exception:\n            if self._is_current():\n                raise",
              "except Exception:\n            raise"),),
        tests=(_REPLACED, "-k", "is_not_missing"),
        note=_NOTE,
    ),
    Mutant(
        481, "a transaction is committed in a file that was replaced while it was made",
        (Edit(f"{_DATABASE}.writing", "if not self._is_current():", "if False:"),),
        tests=(_REPLACED, "-k", "comes_before_its_commit"),
        note=_NOTE,
    ),
    Mutant(
        482, "what was committed in a file that is replaced meanwhile is done again",
        (Edit(f"{_DATABASE}.run", "if self.commits != commits:", "if False:"),),
        tests=(_REPLACED, "-k", "behind_its_commit"),
        note=_NOTE,
    ),
    Mutant(
        483, "a registration that a set-back removed is gone for as long as its session lives",
        (Edit(_MEND, "found.get(registration.key) == registration.stored and", "True and"),),
        tests=(_REPLACED, "-k", "a_set_back_removes"),
        note=_NOTE,
    ),
    Mutant(
        484, "a key that a set-back brings back is held for as long as its session lives",
        (Edit(_MEND, "if mark not in marks:", "if False:"),),
        tests=(_REPLACED, "-k", "and_no_others"),
        note=_NOTE,
    ),
    Mutant(
        485, "a version of before a set-back is that of what was written behind it",
        (Edit("metadata.store:Version.__eq__",
              "(self.number, self.incarnation, self.writers[-1:]) ==",
              "(self.number, self.incarnation, ()) =="),
         Edit("metadata.store:Version.__eq__", "other.writers[-1:],", "(),")),
        tests=(_REPLACED, "-k", "a_version_of_before"),
        note="where a simulated store is set back, all clients end",
    ),
    Mutant(
        486, "a ZooKeeper session goes on asking for what the servers have forgotten",
        (Edit(f"{_SESSION}._are_set_back", "if newest >= self._last_zxid:", "if True:"),),
        tests=("tests/metadata/test_zookeeper_session.py", "-k", "have_forgotten"),
        note=_NOTE,
    ),
    Mutant(
        487, "a ZooKeeper server that lags is taken for one that was set back",
        (Edit(f"{_SESSION}._are_set_back", "if newest >= self._last_zxid:", "if False:"),),
        tests=("tests/metadata/test_zookeeper_session.py", "-k", "lags_is_waited"),
        note=_NOTE,
    ),
    Mutant(
        488, "nobody looks whether a registration's node in ZooKeeper is still there",
        (Edit("metadata.backends.zookeeper.registration:ZooKeeperRegistration._is_there",
              "watch=True", "watch=False"),),
        tests=("tests/metadata/test_contract.py", "-k", "key_is_deleted and zookeeper"),
        note=_NOTE,
    ),
    Mutant(
        489, "a ZooKeeper session goes on in an older copy that has it",
        (Edit("metadata.backends.zookeeper.store:ZooKeeperMetadataStore._sync",
              "and synced <= former:", "and False:"),),
        tests=("tests/metadata/test_zookeeper_set_back.py", "-k", "older_copy_has"),
        note=_NOTE,
    ),
]  # fmt: skip
