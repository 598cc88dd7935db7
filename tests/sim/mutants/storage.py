"""Planted bugs of the bookie: durability, fences, replay, crash recovery, deletion."""

from __future__ import annotations

from tests.sim.mutants.planting import Edit, Mutant

_POWER = ("power-cuts", "rolling-restarts", "chaos", "disk-faults")
_HANDLERS = "bookie_aio.server.handlers"
_RECOVERY = "bookie_aio.storage.crash_recovery:CrashRecovery"
_ABANDONED = "tests/bookie_aio/storage/test_storage_abandoned.py"
_DAMAGE = "tests/bookie_aio/storage/test_storage_damage.py"
_WITNESS = "tests/bookie_aio/storage/test_storage_witness.py"

MUTANTS = [
    Mutant(
        1, "acknowledgement before the fsync",
        (Edit("bookie_aio.storage.journal:Journal._write",
              "segment.file.write_and_sync(buffers, offset, claim, at_once=at_once)",
              "self._loop.create_task(segment.file.write(buffers, offset))"),),
        _POWER,
    ),
    Mutant(
        2, "a fence is not persisted",
        (Edit(f"{_HANDLERS}.fence:Fence.raise_term",
              "self._engine.append_term(ledger_id, term, lambda error: peer.release(WAITING_BYTES))",
              "self._engine._ledgers.state(ledger_id).term = term"),
         Edit(f"{_HANDLERS}.fence:Fence.raise_term", "peer.hold(WAITING_BYTES)", "pass")),
        ("fenced-restarts", "split-brain", *_POWER),
    ),
    Mutant(
        3, "an add ignores the fence",
        (Edit(f"{_HANDLERS}.add:AddHandler._judge", "if verdict is Verdict.REFUSE:", "if False:"),),
        ("split-brain", "duelling-recoverers"),
    ),
    Mutant(
        25, "replay stops silently at corruption in mid-file",
        (Edit("bookie_aio.storage.segment.replay:replay_segment",
              "if following is not None or is_proven:", "if following is not None or is_proven:\n"
              "                break\n            if False:"),),
        ("disk-faults", "chaos"),
    ),
    Mutant(
        26, "no directory sync at rotation",
        (Edit("bookie_aio.storage.segment.files:create_segment",
              "await file.sync()\n        await disk.sync_directory(directory)", "await file.sync()"),
         Edit("bookie_aio.storage.disk.disk:write_file",
              "await disk.sync_directory(directory)", "pass")),
        ("recycling", *_POWER),
        note="the checkpoint that lists the new segment syncs the same directory, and would hide it: both "
        "are left out",
    ),
    Mutant(
        27, "a failed fsync is retried",
        (Edit("bookie_aio.storage.journal:Journal._written", "if future.cancelled() or error is not None:",
              "if error is not None and not future.cancelled():\n"
              "        self._loop.create_task(group.segment.file.sync()).add_done_callback(self._written)\n"
              "        return\n"
              "    if future.cancelled() or error is not None:"),),
        ("disk-faults", "chaos"),
    ),
    Mutant(
        28, "a checkpoint ahead of what it covers",
        (Edit("bookie_aio.storage.maintenance.sealer:SegmentSealer._seal",
              "    await self._checkpointer.write_locked()\n", ""),),
        ("fenced-restarts", *_POWER),
        note="a segment counts as sealed, and is not replayed, before the checkpoint holds its fences",
    ),
    Mutant(
        29, "corrupt answered as absent",
        (Edit("bookie_aio.storage.read.lookup:Lookup.read", "error)\n            return reader.unknown()",
              "error)\n            return ReadResult([], Stop.NO_SUCH_ENTRY, entry_ids[0])"),),
        ("disk-faults", "chaos"),
    ),
    Mutant(
        568, "a damaged entry takes those before it in its block with it",
        (Edit("bookie_aio.storage.read.reader:Reader._take_beginning",
              "self._entry_id = block.entry_ids[start + count]\n    if count:", "if False:"),),
        ("disk-faults", "chaos", "damaged-files"),
    ),
    Mutant(
        570, "a start does not list a block of which an entry is damaged",
        (Edit("bookie_aio.storage.segment.replay:Replayed.apply",
              "runs = self.index.ledgers.get(ledger_id)",
              "if is_damaged:\n                continue\n"
              "            runs = self.index.ledgers.get(ledger_id)"),),
        tests=(_DAMAGE, "-k", "takes_none_of_its_block and killed"),
        note="the simulator takes no listing for granted of a bookie that lost data",
    ),
    Mutant(
        571, "the scrubber marks damage that was repaired",
        (Edit("bookie_aio.storage.maintenance.scrubber:Scrubber._check",
              "state = self._ledgers.get(ledger_id)", "raise"),),
        tests=(_DAMAGE, "-k", "not_marked_again"),
        note="nothing is lost: the ledger is verified after each scrub",
    ),
    Mutant(
        572, "compaction is held up by damage that was repaired",
        (Edit("bookie_aio.storage.maintenance.compactor:Compactor._read",
              "return await read_part(found, ledger_id, entry_ids)",
              "return await read_part(found, ledger_id, found.run.entry_ids)"),),
        tests=("tests/bookie_aio/storage/test_storage_compactor.py", "-k", "holds_up_no_compaction"),
        note="as 571: space does not come back",
    ),
    Mutant(
        578, "a damaged head costs its whole block",
        (Edit("bookie_aio.wire.blocks:Block.salvage",
              "if len(view) < known.head_bytes or", "if True or len(view) < known.head_bytes or"),),
        tests=(_DAMAGE, "-k", "head_costs"),
        note="as 570",
    ),
    Mutant(
        600, "an entry of a damaged head is served with a code that nothing proves",
        (Edit("bookie_aio.wire.blocks:Block.salvage",
              "known.head_bytes != HEADER_BYTES", "known.head_bytes < HEADER_BYTES"),
         Edit("bookie_aio.wire.blocks:Block.salvage", "block.mac_bytes = 0",
              "block.mac_bytes = (block.head_bytes - HEADER_BYTES - 16 * block.count) // (block.count + 1)")),
        tests=(_DAMAGE, "-k", "code_is_damaged"),
        note="the simulator flips no bits of codes in ledgers that are read with the password",
    ),
    Mutant(
        603, "a read denies an entry whose ledger is marked while the disk is read",
        (Edit("bookie_aio.storage.read.lookup:Lookup.read",
              "was_in_doubt or self._damage_marker.is_in_doubt(ledger_id)", "was_in_doubt"),),
        tests=(_DAMAGE, "-k", "marked_while_the_disk"),
    ),
    Mutant(
        604, "the scrubber takes the head of an index from memory",
        (Edit("bookie_aio.storage.segment.segment:SealedIndex.check",
              "self._heads.drop(self.row.segment_id)", "pass"),),
        tests=(_DAMAGE, "-k", "that_is_in_memory"),
    ),
    Mutant(
        605, "nobody looks at the first bytes of a block until it is read",
        (Edit("bookie_aio.storage.segment.format:Row.body_is_intact",
              "body[:8] != BLOCK_MAGIC +", "body[4:8] !="),),
        tests=(_DAMAGE, "-k", "code_is_damaged"),
    ),
    Mutant(
        606, "the scrubber marks damage in trimmed entries",
        (Edit("bookie_aio.storage.maintenance.scrubber:Scrubber._check",
              "max(found.run.first, 0 if state is None else state.first)", "found.run.first"),),
        tests=(_DAMAGE, "-k", "trimmed_part"),
        note="nothing is lost: the ledger is repaired again and again",
    ),
    Mutant(
        30, "an add after the deletion",
        (Edit("bookie_aio.server.dispatcher:Dispatcher._carry_out",
              "and self._engine.is_deleted(ledger_id) and op not in _OF_DELETED",
              "and self._engine.is_deleted(ledger_id) and op not in (*_OF_DELETED, Op.ADD)"),
         Edit("bookie_aio.storage.ledgers.ledger_states:LedgerStates.accept",
              "if self.is_deleted(ledger_id):", "if False:"),
         Edit("bookie_aio.storage.ledgers.ledger_states:LedgerStates.accept_blocks",
              "if self.is_deleted(block.ledger_id):", "if False:")),
        ("deletions",),
    ),
    Mutant(
        35, "a duplicate acknowledged before the first copy is durable",
        (Edit(f"{_HANDLERS}.add:AddHandler.add", "    size = len(body)\n    if request.flags == _DEFERRED:",
              "    size = len(body)\n"
              "    seen = self.__dict__.setdefault('_seen', set())\n"
              "    if (block.ledger_id, block.first_entry, block.count) in seen:\n"
              "        peer.send(ADDED.pack(request_id))\n"
              "        return\n"
              "    seen.add((block.ledger_id, block.first_entry, block.count))\n"
              "    if request.flags == _DEFERRED:"),),
        ("resends", "duelling-recoverers", *_POWER),
    ),
    Mutant(
        36, "a negative recovery read answered before earlier adds are durable",
        (Edit(f"{_HANDLERS}.read:ReadHandler._answer_read", "if fences:\n", "if False:\n"),
         Edit(f"{_HANDLERS}.read:ReadHandler._answer_read", "and was_pending and not fences:", "and False:")),
        ("late-adds", "split-brain", "duelling-recoverers"),
    ),
    Mutant(
        39, "stale records of a recycled segment are replayed",
        (Edit("bookie_aio.storage.segment.format:peek_group_header",
              "header.segment_id != segment.segment_id\n"
              "        or header.generation != segment.generation\n        or header",
              "header"),),
        ("recycling", "deletions", "power-cuts"),
    ),
    Mutant(
        50, "that data was lost is not heard from a tail",
        (Edit("bookie_aio.storage.crash_recovery:CrashRecovery._take_tail",
              "if tail is not None:", "if False:"),
         Edit("bookie_aio.storage.crash_recovery:RecoveredState.first_records",
              "if not row.is_of_all and self.deleted.covers(row.ledger_id, row.last_ledger):",
              "if row.is_of_all or self.deleted.covers(row.ledger_id, row.last_ledger):")),
        tests=("tests/bookie_aio/storage/test_storage_damage.py", "-k",
               "still_known_after_a_start_on_a_full_disk"),
    ),
    Mutant(
        51, "a start on a full disk cuts what a tail says that may be in the page cache only",
        (Edit("bookie_aio.storage.crash_recovery:CrashRecovery._replay", "may_be_cut = not is_lone",
              "may_be_cut = True"),),
        tests=("tests/sim/test_sim_crashstates.py", "-k", "page_cache_only"),
    ),
    Mutant(
        52, "a start goes by names that are not durable",
        (Edit("bookie_aio.storage.found_files:FoundFiles.names",
              "await self._disk.sync_directory(directory)",
              "pass"),),
        tests=("tests/sim/test_sim_crashstates.py", "-k", "makes_names_durable"),
    ),
    Mutant(
        91, "a mark is lifted before the copies are there",
        (Edit("bookie_aio.server.healing:Healing.lift",
              "await self._check_held(ledger_id, one)", "pass"),
         Edit("client_aio.admin.repair:Repair._repair_part",
              "self._mark = await self._call_for_mark(connection, 0)",
              "self._mark = await self._call_for_mark(connection, 0)\n"
              "        if self._mark and metadata.is_closed:\n"
              "            await self._call_for_mark(connection, self._mark)")),
        ("healed-disks",),
    ),
    Mutant(
        92, "a mark of an open ledger is lifted",
        (Edit("bookie_aio.core.healing:why_marked", "if metadata.is_closed:", "if True:"),),
        ("healed-disks",),
    ),
    Mutant(
        93, "a restart forgets that a mark was lifted",
        (Edit("bookie_aio.storage.ledgers.checkpoint:pack_state", "state.marked, state.lifted,",
              "state.marked, 0,"),),
        ("healed-disks",),
    ),
    Mutant(
        94, "a mark is lifted without the fence that was lost",
        (Edit("bookie_aio.storage.marking:Marking.lift", "state.term = max(state.term, term)", "pass"),
         Edit("bookie_aio.storage.ledgers.ledger_states:LedgerStates._apply",
              "state.term = max(state.term, change.term)\n        state.lifted",
              "state.lifted")),
        tests=("tests/bookie_aio/storage/test_storage_marks.py", "-k", "leaves_the_fence"),
    ),
    Mutant(
        95, "damage that is found while a client verifies is lifted with the mark before it",
        (Edit("bookie_aio.storage.ledgers.ledger_states:LedgerStates.needs_mark",
              "not number or self.marks.is_told(number)", "not number"),),
        tests=("tests/bookie_aio/storage/test_storage_marks.py", "-k", "after_a_client_asked"),
    ),
    Mutant(
        96, "a loss gets a bound that was asked for before it",
        (Edit("bookie_aio.storage.marking:Marking.bound_to", "bound = self._bound(up_to)",
              "number, bound = self._ledgers.marks.number, self._bound(up_to)"),),
        tests=("tests/bookie_aio/storage/test_storage_marks.py", "-k", "loss_that_is_found_meanwhile"),
    ),
    Mutant(
        97, "a ledger is created below the id floor",
        (Edit("metadata.access.ledgers:LedgerStore.create_ledger",
              "if ledger_id < max(floor,", "if -1 > max(floor,"),),
        ("recycling", "deletions", "chaos"),
        note="an id that a client drew in a block counts as gone where no ledger has it",
    ),
    Mutant(
        71, "where the witness says that groups end is not heard",
        (Edit(f"{_RECOVERY}._replay_one", "claimed = self._files.claimed_end(segment_id)", "claimed = 0"),),
        tests=(_WITNESS, "-k", "damaged_tail"),
    ),
    Mutant(
        72, "an older checkpoint is believed",
        (Edit(f"{_RECOVERY}._judge", "if checkpoint.number < self._newest:", "if False:"),),
        tests=(_WITNESS, "-k", "older_checkpoint"),
    ),
    Mutant(
        73, "beside an older checkpoint nothing is learnt, and what it does not know is removed",
        (Edit(f"{_RECOVERY}._is_learning", "not self._is_trusted", "self._checkpoint is None"),),
        tests=(_WITNESS, "-k", "older_checkpoint"),
    ),
    Mutant(
        74, "a segment's size is not compared with its header",
        (Edit(f"{_RECOVERY}._replay_one", "if size < capacity and", "if False and"),),
        tests=(_WITNESS, "-k", "shorter_than_its_header"),
    ),
    Mutant(
        75, "a segment's generation is not compared with the one that is listed",
        (Edit("bookie_aio.storage.found_files:FoundFiles.check", "if generations and", "if False and"),),
        tests=(_WITNESS, "-k", "another_life"),
    ),
    Mutant(
        76, "a missing witness is no loss",
        (Edit(f"{_RECOVERY}._judge", "elif not witness.is_whole_somewhere:", "elif False:"),),
        tests=(_WITNESS, "-k", "without_a_witness"),
    ),
    Mutant(
        77, "a group is claimed before its fsync",
        (Edit("bookie_aio.storage.disk.disk:RealFile._write_sync_and_write",
              "        self._write_and_sync(buffers, offset)\n", ""),
         Edit("bookie_aio.storage.disk.disk:RealFile._write_sync_and_write",
              'raise _typed(error, f"writing {file._path}") from error\n',
              'raise _typed(error, f"writing {file._path}") from error\n'
              "        self._write_and_sync(buffers, offset)\n")),
        tests=(_WITNESS, "-k", "claimed"),
    ),
    Mutant(
        78, "a segment is cut before its header has the new capacity",
        (Edit("bookie_aio.storage.segment.files:cut_file",
              "    await file.write([form.encode_header_sector(header)], 0)\n    await file.sync()\n", ""),),
        tests=(_WITNESS, "-k", "full_start_cuts"),
    ),
    Mutant(
        79, "a checkpoint is not told to the witness",
        (Edit("bookie_aio.storage.ledgers.checkpointer:Checkpointer._note",
              "await self._witness.note_checkpoint(number)", "pass"),),
        tests=(_WITNESS, "-k", "older_checkpoint"),
    ),
    Mutant(
        80, "a disk that has become slow goes on stopping the event loop",
        (Edit("bookie_aio.storage.journal:SyncGuard.note", "self._left = self._pause", "pass"),),
        tests=("tests/bookie_aio/storage/test_storage_journal.py", "-k", "becomes_slow"),
    ),
    Mutant(
        87, "a receive buffer is used again while the journal still writes from it",
        (Edit("bookie_aio.wire.frames:FrameParser._new_buffer", "_has_no_view(former)", "True"),),
        tests=("tests/bookie_aio/wire/test_wire_frames.py", "-k", "nobody_looks"),
    ),
    Mutant(
        310, "the time of a block counts for one entry",
        (Edit(f"{_HANDLERS}.add:AddHandler._count",
              "latency.counts[bisect_left(latency.bounds, taken_s)] += count",
              "latency.counts[bisect_left(latency.bounds, taken_s)] += 1"),),
        ("chaos", "split-brain"),
    ),
    Mutant(
        400, "who waits for a durable group that cannot be indexed waits for ever",
        (Edit("bookie_aio.storage.journal:Journal._written",
              "self._on_dropped(group.records, error)", "pass"),),
        tests=(_ABANDONED, "-k", "leaves_nobody_waiting"),
    ),
    Mutant(
        401, "a durable group is left out where the group behind it cannot be written",
        (Edit("bookie_aio.storage.journal:Journal._written",
              "group.segment.end = self._offset\n", "group.segment.end = self._offset\n    self.launch()\n"),
         Edit("bookie_aio.storage.journal:Journal._written",
              "self.launch()\n        self._on_group(group)", "self._on_group(group)")),
        tests=(_ABANDONED, "-k", "leaves_nobody_waiting"),
    ),
    Mutant(
        402, "a preparation of a segment that somebody cancels is under way for ever",
        (Edit("bookie_aio.storage.segment.allocator:SegmentAllocator._run",
              'self._health.watch(self._task, "the preparation of a segment")', "pass"),),
        tests=(_ABANDONED, "-k", "preparation_that_somebody_cancels"),
    ),
    Mutant(
        403, "a failed sync of a directory is forgotten where nobody waits for it",
        (Edit("bookie_aio.storage.health:FailStopDisk.sync_directory",
              "await asyncio.shield(syncing)", "await syncing"),
         Edit("bookie_aio.storage.health:FailStopDisk._note_sync",
              'self._note(DiskFailedError("a sync of a directory was cancelled"))', "return")),
        tests=(_ABANDONED, "-k", "nobody_waits_for_it"),
    ),
    Mutant(
        404, "a spare file that cannot be used now is forgotten",
        (Edit("bookie_aio.storage.segment.allocator:SegmentAllocator._reuse_spare",
              "self._spares.insert(0, spare)\n            raise\n        return await settle_name",
              "raise\n        return await settle_name"),),
        tests=(_ABANDONED, "-k", "not_forgotten"),
    ),
    Mutant(
        405, "what is forgotten while it is copied counts again",
        (Edit("bookie_aio.storage.engine:Engine.append_forget", "watch.note_forget(ledger_id)", "pass"),),
        tests=("tests/bookie_aio/storage/test_storage_compactor.py", "-k", "counts_no_more"),
    ),
]  # fmt: skip
