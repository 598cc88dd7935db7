"""Planted bugs of frames with many requests: what one block gets that belongs to another.

Each breaks the rule that the ADDs of an ADDS are judged, stored and acknowledged each by itself.
"""

from __future__ import annotations

from tests.sim.mutants.planting import Edit, Mutant

_ADD = "bookie_aio.server.handlers.add:AddHandler"
_LACS = "bookie_aio.server.handlers.lac:LacHandler"
_STATES = "bookie_aio.storage.ledgers.ledger_states:LedgerStates"
_SERVER = "tests/bookie_aio/server/test_server_adds.py"
_CLIENT = "tests/client_aio/test_client_connection.py"
_CROWDS = ("fenced-among-many", "many-ledgers")

MUTANTS = [
    Mutant(
        330, "a block that is refused is acknowledged with the others of its frame",
        (Edit(f"{_ADD}.gather", "if block is None:\n        return",
              "if block is None:\n"
              "        self._gathered = self._gathered or _Gathered(peer, frame, start)\n"
              "        self._gathered.request_ids.append(request_id)\n"
              "        return"),),
        _CROWDS,
    ),
    Mutant(
        331, "the second block of a record is acknowledged before it is durable",
        (Edit(f"{_ADD}.flush", "    if gathered.deferred_ids:",
              "    self._tell_added(peer, gathered.request_ids[1:])\n"
              "    del gathered.request_ids[1:]\n"
              "    if gathered.deferred_ids:"),),
        ("forced-among-many", *_CROWDS),
    ),
    Mutant(
        332, "an answer names as many adds in a row as are durable, the refused ones among them",
        (Edit(f"{_ADD}._tell_added", "peer.send(encode_done(Op.ADDS, request_ids))",
              "first = request_ids[0]\n"
              "        peer.send(encode_done(Op.ADDS, list(range(first, first + len(request_ids)))))"),),
        _CROWDS,
    ),
    Mutant(
        333, "a higher term is raised for the ledger of the block before",
        (Edit(f"{_ADD}._judge", "self.flush()\n        self._fence.raise_term(peer, ledger_id, request.term)",
              "former = self._gathered.blocks[-1].ledger_id if self._gathered else ledger_id\n"
              "        self.flush()\n        self._fence.raise_term(peer, former, request.term)"),),
        tests=(_SERVER, "-k", "one_after_another or higher_term"),
    ),
    Mutant(
        334, "a token that opens one ledger of a frame is taken for the others",
        (Edit("bookie_aio.server.dispatcher:Dispatcher._carry_out",
              "refusal = self._authoriser.authorise(peer, request, auth, answer)",
              "refusal = self._authoriser.authorise(peer, request, auth, answer)\n"
              "        if many is not None and refusal is None and auth is not None:\n"
              "            self._opened = many[0]\n"
              "        if many is not None and getattr(self, '_opened', None) is many[0]:\n"
              "            refusal = None"),),
        tests=(_SERVER, "-k", "one_after_another"),
    ),
    Mutant(
        335, "the blocks of a record are indexed where the first of them lies",
        (Edit(f"{_STATES}.index", "            offset += size\n",
              "            offset += 0 if isinstance(event, list) and block is not event[-1] else size\n"),),
        _CROWDS,
    ),
    Mutant(
        336, "a lost connection fails one of the adds of a frame only",
        (Edit("client_aio.bookies.connection:BookieConnection._end",
              "for request in requests.values():",
              "ends = list(requests.values())\n"
              "    for index, request in enumerate(ends):\n"
              "        if request[3] == _ADD and index and ends[index - 1][3] == _ADD:\n"
              "            continue"),),
        tests=(_CLIENT, "-k", "lost_connection"),
    ),
    Mutant(
        337, "deferred sync of one block is that of all blocks behind it",
        (Edit(f"{_ADD}.gather", "is_deferred=request.flags == _DEFERRED",
              "is_deferred=request.flags == _DEFERRED or bool(gathered.deferred_ids)"),),
        ("forced-among-many",),
    ),
    Mutant(
        338, "a block that is refused ends its frame",
        (Edit("bookie_aio.server.dispatcher:Dispatcher._take_adds", "if peer.again:",
              "if self.metrics.refused_terms > getattr(self, '_refused', 0):\n"
              "                self._refused = self.metrics.refused_terms\n"
              "                return\n"
              "            if peer.again:"),),
        tests=(_SERVER, "-k", "no_others"),
    ),
    Mutant(
        339, "lost data is looked for of the first ledger of a record only",
        (Edit(f"{_ADD}._judge", "if engine.is_in_doubt(ledger_id):",
              "if engine.is_in_doubt("
              "self._gathered.blocks[0].ledger_id if self._gathered else ledger_id):"),),
        tests=(_SERVER,),
        note="damaged-among-many needs 124 seeds: most of its damage is of listed entries",
    ),
    Mutant(
        340, "a record of many blocks counts as one record that is accepted",
        (Edit(f"{_STATES}.accept_blocks", "        accepted += 1\n",
              "        accepted += block is blocks[0]\n"),),
        _CROWDS,
    ),
    Mutant(
        341, "the blocks of a record state their LACs for its first ledger",
        (Edit(f"{_STATES}.index", "state.statement = block.statement",
              "states[event[0].ledger_id if isinstance(event, list) else ledger_id].statement = "
              "block.statement"),),
        _CROWDS,
    ),
    Mutant(
        342, "an answer to WRITE_LACS names the refused ones, too",
        (Edit(f"{_LACS}.write_lac",
              "if not self._fence.admit(peer, Op.WRITE_LAC, request_id, ledger_id, request.term):",
              "if not self._fence.admit(peer, Op.WRITE_LAC, request_id, ledger_id, request.term):\n"
              "        if self._many is not None:\n"
              "            self._many.request_ids.append(request_id)"),),
        tests=(_SERVER, "-k", "write_lacs_are_judged"),
    ),
    Mutant(
        343, "a block that leaves alone overtakes those before it that share a frame",
        (Edit("bookie_aio.wire.many:frames_of_adds",
              "buffers += (request.frame_head(request_id, size), held[first][2])",
              "buffers[:0] = (request.frame_head(request_id, size), held[first][2])"),),
        tests=("tests/bookie_aio/wire/test_wire_many.py", "-k", "leave_together"),
    ),
    Mutant(
        344, "what is gathered when a frame has to wait is forgotten",
        (Edit("bookie_aio.server.dispatcher:Dispatcher._take_adds",
              "peer.again.append(partial(self._take_adds, peer, frame, adds))",
              "self._adds._gathered = None\n"
              "                peer.again.append(partial(self._take_adds, peer, frame, adds))"),),
        tests=(_SERVER, "-k", "waits_for_the_metadata_store"),
    ),
    Mutant(
        345, "the buffer of an idle connection is filled again under the bodies in it",
        (Edit("bookie_aio.wire.frames:FrameParser.next_packed", "self._is_lent = True", "pass"),),
        tests=("tests/bookie_aio/wire/test_wire_frames.py", "-k", "offered_buffer or keeps_its_buffer"),
    ),
    Mutant(
        543, "of many writers that become idle together only a few publish at a tick",
        (Edit("client_aio.lac_clock:LacClock._tick", "if self._has_busy else MANY_MAX", ""),),
        tests=("tests/client_aio/test_client_lac_clock.py", "-k", "share_one_timer"),
        note="readers see the same, only later",
    ),
    Mutant(
        599, "an idle writer does not state a LAFR that moves behind its LAC",
        (Edit("client_aio.lac_clock:LacPublisher.look", "stated == self._published",
              "stated[0] == self._published[0]"),),
        tests=("tests/client_aio/test_client_lac_clock.py", "-k", "lafr"),
        note="a recovery with a bookie away has more to write back, and asks for a spare",
    ),
]  # fmt: skip
