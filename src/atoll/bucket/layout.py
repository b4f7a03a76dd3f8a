"""Which object holds what of a run directory, and what follows from a listing: names and plans, without I/O.

    store.json, terms/000003, released/000003, heads/000003
    journal/segment-000003/000000000000-000000012345    those bytes of journal/segment-000003.log
    cuts/000120/000003/theta-000.bin                    of cut 120, as term 3 wrote it; learners/NAME/FILE below it
    files/000003/run.toml                               as the syncer of term 3 found it
    events/000003/000000000000-000000004711             those bytes of events.jsonl
    shards/2/journal/…, shards/2/cuts/…                 the same of another shard of the syncer, by terms of its own

Whatever a term wrote carries the term in its name (docs/adr/0033).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

STORE = "store.json"
TERMS, RELEASED, HEADS, JOURNAL, CUTS, FILES, EVENTS = (
    "terms",
    "released",
    "heads",
    "journal",
    "cuts",
    "files",
    "events",
)
SHARDS = "shards"
PIECE_BYTES = 16 * 2**20
"""Of a growing file, in one object at most: it is read into memory, and sent by one request."""
MANY_PIECES = 256
"""So many pieces of one segment are put together into one: a restore would ask for each of them."""

_PIECE = re.compile(r"(.+)/(\d{12,})-(\d{12,})")
_CUT = re.compile(r"cuts/(\d{6,})/(\d{6,})/(.+)")
_FILE = re.compile(r"(files|events)/(\d{6,})/(.+)")
_NUMBERED = re.compile(r"(terms|released|heads)/(\d{6,})")
_SEGMENT = re.compile(r"segment-(\d{6,})")
_PAYLOAD = re.compile(r"payload-(\d{6,})-(\d{4,})")


def shard_url(url: str, shard: int) -> str:
    """Where another shard of the syncer keeps its chain and its parts of cuts, by keys of its own."""
    return f"{url.rstrip('/')}/{SHARDS}/{shard}"


def term_key(term: int) -> str:
    return f"{TERMS}/{term:06d}"


def released_key(term: int) -> str:
    return f"{RELEASED}/{term:06d}"


def head_key(term: int) -> str:
    return f"{HEADS}/{term:06d}"


def file_key(term: int, name: str) -> str:
    return f"{FILES}/{term:06d}/{name}"


def cut_key(cut: int, term: int, name: str) -> str:
    return f"{CUTS}/{cut:06d}/{term:06d}/{name}"


def segment_name(term: int) -> str:
    return f"segment-{term:06d}"


def payload_name(term: int, file: int) -> str:
    return f"payload-{term:06d}-{file:04d}"


def local_name(journal_file: str) -> str:
    """In the folder journal/ of a run directory."""
    return f"{journal_file}.log" if journal_file.startswith("segment") else f"{journal_file}.bin"


def payload_place(journal_file: str) -> tuple[int, int] | None:
    """The term and number of a payload file; None: it is a segment."""
    found = _PAYLOAD.fullmatch(journal_file)
    return (int(found[1]), int(found[2])) if found else None


def segment_term(journal_file: str) -> int | None:
    """None: it is no segment."""
    found = _SEGMENT.fullmatch(journal_file)
    return int(found[1]) if found else None


@dataclass(frozen=True, slots=True, order=True)
class CopyPiece:
    """The bytes of a growing file that one object holds."""

    begin: int
    end: int

    def key(self, folder: str) -> str:
        return f"{folder}/{self.begin:012d}-{self.end:012d}"


def cut_pieces(done: int, size: int, most: int = PIECE_BYTES) -> list[CopyPiece]:
    """What is still to be put of a file that has grown to this size."""
    return [CopyPiece(begin, min(begin + most, size)) for begin in range(done, size, most)]


def cover(pieces: Iterable[CopyPiece]) -> list[CopyPiece]:
    """Of pieces that may overlap, the fewest that lead from the first byte on without a gap, in order."""
    way: list[CopyPiece] = []
    waiting = sorted(pieces)
    end = 0
    while True:
        best = max((one for one in waiting if one.begin <= end < one.end), key=lambda one: one.end, default=None)
        if best is None:
            return way
        way.append(best)
        end = best.end


def covered(pieces: Iterable[CopyPiece]) -> int:
    way = cover(pieces)
    return way[-1].end if way else 0


def needless_pieces(pieces: Iterable[CopyPiece]) -> list[CopyPiece]:
    """Those that lie inside of another."""
    known = list(pieces)
    return [one for one in known if any(o != one and o.begin <= one.begin and one.end <= o.end for o in known)]


def join_pieces(pieces: Sequence[CopyPiece], many: int = MANY_PIECES) -> CopyPiece | None:
    """The piece that is to take the place of many small ones; None: there are few, or they are large."""
    way = cover(pieces)
    small = [one for one in way if one.end - one.begin < PIECE_BYTES // 2]
    if len(small) < many:
        return None
    begin = small[0].begin
    return CopyPiece(begin, min(way[-1].end, begin + PIECE_BYTES))


@dataclass(frozen=True, slots=True)
class StoredCutKey:
    """A cut in the bucket."""

    cut: int
    term: int
    """Of the syncer that wrote it."""

    def key(self, name: str) -> str:
        return cut_key(self.cut, self.term, name)


@dataclass
class Listing:
    """What a bucket holds, by what it is."""

    terms: set[int] = field(default_factory=set)
    released: set[int] = field(default_factory=set)
    heads: set[int] = field(default_factory=set)
    journal: dict[str, set[CopyPiece]] = field(default_factory=dict)
    """By file: segment-000003, payload-000003-0002."""
    cuts: dict[StoredCutKey, dict[str, int]] = field(default_factory=dict)
    """Their files with sizes; learners' parts as learners/NAME/FILE."""
    files: dict[int, dict[str, int]] = field(default_factory=dict)
    """By term, sizes."""
    events: dict[int, set[CopyPiece]] = field(default_factory=dict)
    """By term."""
    holds_store: bool = False

    @property
    def newest_term(self) -> int:
        return max(self.terms, default=0)

    def complete_cuts(self) -> list[StoredCutKey]:
        """The newest first; of one number that of the highest term."""
        whole = [one for one, files in self.cuts.items() if {"syncer.json", "manifest.json"} <= files.keys()]
        return sorted(whole, key=lambda one: (one.cut, one.term), reverse=True)

    def segment_terms(self) -> list[int]:
        """Those of which a part of the segment is here. A shard's have gaps of many thousands (restore.py)."""
        return sorted(term for name in tuple(self.journal) if (term := segment_term(name)) is not None)

    def journal_end(self, term: int) -> int:
        """Up to which byte the segment of a term is here."""
        return covered(tuple(self.journal.get(segment_name(term), ())))

    def choose_files(self, below: int | None = None) -> dict[str, tuple[int, int]]:
        """Of every file the highest term that has it, of those below this one, and its size. A model is that of the
        journal's head, so only one that the newest of them wrote counts."""
        below = self.newest_term + 1 if below is None else below
        newest = max((term for term in self.terms if term < below), default=0)
        found: dict[str, tuple[int, int]] = {}
        for term in sorted(term for term in self.files if term < below):
            for name, size in self.files[term].items():
                if name != "model.safetensors" or term == newest:
                    found[name] = (term, size)
        return found


def read_listing(objects: Mapping[str, int]) -> Listing:
    """By key, the size of every object; what is not ours is passed over."""
    found = Listing()
    for key, size in objects.items():
        if key == STORE:
            found.holds_store = True
        elif numbered := _NUMBERED.fullmatch(key):
            getattr(found, numbered[1]).add(int(numbered[2]))
        elif cut := _CUT.fullmatch(key):
            found.cuts.setdefault(StoredCutKey(int(cut[1]), int(cut[2])), {})[cut[3]] = size
        elif (piece := _PIECE.fullmatch(key)) and int(piece[3]) - int(piece[2]) == size:
            _add_piece(found, piece[1], CopyPiece(int(piece[2]), int(piece[3])))
        elif (file := _FILE.fullmatch(key)) and file[1] == FILES:
            found.files.setdefault(int(file[2]), {})[file[3]] = size
    return found


def _add_piece(found: Listing, folder: str, piece: CopyPiece) -> None:
    kind, _, name = folder.partition("/")
    if kind == JOURNAL:
        found.journal.setdefault(name, set()).add(piece)
    elif kind == EVENTS and name.isdigit():
        found.events.setdefault(int(name), set()).add(piece)


@dataclass(frozen=True, slots=True)
class EventPart:
    """Bytes of events.jsonl that one term wrote."""

    term: int
    begin: int
    end: int


def lay_events(events: Mapping[int, Iterable[CopyPiece]]) -> list[EventPart]:
    """Whose bytes count, in order: from where a later term began to write, its own."""
    parts: list[EventPart] = []
    for term in sorted(events):
        pieces = sorted(events[term])
        begin = pieces[0].begin if pieces else 0
        end = begin
        for one in pieces:
            end = max(end, one.end) if one.begin <= end else end
        parts = [EventPart(o.term, o.begin, min(o.end, begin)) for o in parts if o.begin < begin]
        if not parts or parts[-1].end == begin:
            parts.append(EventPart(term, begin, end))
    return [part for part in parts if part.end > part.begin]


def needless_objects(listing: Listing, kept: Sequence[StoredCutKey], payloads_from: tuple[int, int]) -> list[str]:
    """What newer complete cuts make needless: cuts older than those that are kept, and payloads before
    (term, file)."""
    if not kept:
        return []
    oldest = min(one.cut for one in kept)
    keys = [one.key(name) for one, files in listing.cuts.items() if one.cut < oldest for name in _manifest_first(files)]
    for name in tuple(listing.journal):
        place, pieces = payload_place(name), tuple(listing.journal[name])
        needless = pieces if place is not None and place < payloads_from else needless_pieces(pieces)
        keys += [piece.key(f"{JOURNAL}/{name}") for piece in sorted(needless)]
    return keys


def _manifest_first(files: Iterable[str]) -> list[str]:
    """So that nobody takes half of a cut for a whole one."""
    return sorted(files, key=lambda name: (name != "manifest.json", name != "syncer.json", name))
