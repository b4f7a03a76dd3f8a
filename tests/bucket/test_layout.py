"""Names of objects, and what follows from a listing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from atoll.bucket.layout import (
    PIECE_BYTES,
    CopyPiece,
    StoredCutKey,
    cover,
    covered,
    cut_pieces,
    join_pieces,
    lay_events,
    needless_objects,
    needless_pieces,
    read_listing,
)


def keys_of_cut(cut: int, term: int, *names: str) -> dict[str, int]:
    return {f"cuts/{cut:06d}/{term:06d}/{name}": 4 for name in names}


WHOLE = ("state.bin", "syncer.json", "manifest.json")


def test_a_listing_is_read_back_into_what_it_is_of() -> None:
    found = read_listing(
        {
            "store.json": 9,
            "terms/000001": 5,
            "terms/000002": 5,
            "released/000001": 2,
            "journal/segment-000001/000000000000-000000000010": 10,
            "journal/segment-000001/000000000010-000000000030": 20,
            "journal/payload-000001-0001/000000000000-000000000007": 7,
            **keys_of_cut(120, 2, *WHOLE, "learners/a/cut-000120.safetensors"),
            "files/000001/run.toml": 3,
            "events/000001/000000000000-000000000100": 100,
            "somebody/else": 1,
        }
    )
    assert found.holds_store and found.newest_term == 2 and found.released == {1}
    assert found.journal_end(1) == 30 and found.journal_end(2) == 0
    assert found.complete_cuts() == [StoredCutKey(120, 2)]
    assert found.choose_files() == {"run.toml": (1, 3)}
    assert found.events == {1: {CopyPiece(0, 100)}}


def test_a_piece_whose_size_is_not_what_its_name_says_counts_for_nothing() -> None:
    assert read_listing({"journal/segment-000001/000000000000-000000000010": 9}).journal_end(1) == 0


def test_a_cut_without_its_manifest_is_none() -> None:
    found = read_listing({**keys_of_cut(30, 1, "state.bin", "syncer.json"), **keys_of_cut(20, 1, *WHOLE)})
    assert found.complete_cuts() == [StoredCutKey(20, 1)]


def test_a_model_counts_only_if_the_newest_term_wrote_it() -> None:
    objects = {"terms/000001": 1, "terms/000002": 1, "files/000001/model.safetensors": 8, "files/000001/run.toml": 3}
    assert "model.safetensors" not in read_listing(objects).choose_files()
    assert "model.safetensors" in read_listing(objects).choose_files(below=2)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.data())
def test_pieces_of_any_growth_and_any_joins_cover_all_of_it(grown: list[int], data: st.DataObject) -> None:
    pieces, size = set[CopyPiece](), 0
    for more in grown:
        size += more
        pieces.update(cut_pieces(covered(pieces), size, most=16))
        if data.draw(st.booleans()) and (joined := join_pieces(sorted(pieces), many=3)) is not None:
            pieces.add(joined)
            pieces.difference_update(needless_pieces(sorted(pieces)))
    assert covered(pieces) == size
    way, at = cover(pieces), 0
    for piece in way:
        assert piece.begin <= at < piece.end
        at = piece.end


def test_a_gap_ends_what_counts() -> None:
    assert covered([CopyPiece(0, 10), CopyPiece(12, 20)]) == 10
    assert covered([CopyPiece(5, 10)]) == 0


def test_few_pieces_or_large_ones_are_left_as_they_are() -> None:
    assert join_pieces([CopyPiece(0, 1), CopyPiece(1, 2)], many=3) is None
    large = [CopyPiece(n * PIECE_BYTES, (n + 1) * PIECE_BYTES) for n in range(4)]
    assert join_pieces(large, many=3) is None
    tail = [CopyPiece(4 * PIECE_BYTES + n, 4 * PIECE_BYTES + n + 1) for n in range(3)]
    assert join_pieces([*large, *tail], many=3) == CopyPiece(4 * PIECE_BYTES, 4 * PIECE_BYTES + 3)


def test_events_of_a_later_term_take_the_place_of_what_a_replaced_syncer_went_on_to_say() -> None:
    laid = lay_events({1: [CopyPiece(0, 100), CopyPiece(100, 150)], 3: [CopyPiece(100, 120), CopyPiece(120, 140)]})
    assert [(part.term, part.begin, part.end) for part in laid] == [(1, 0, 100), (3, 100, 140)]
    anew = lay_events({1: [CopyPiece(0, 100)], 4: [CopyPiece(0, 30)]})
    assert [(part.term, part.begin, part.end) for part in anew] == [(4, 0, 30)]


def test_older_cuts_and_payloads_go_and_the_manifest_first() -> None:
    listing = read_listing(
        {
            **keys_of_cut(10, 1, *WHOLE),
            **keys_of_cut(20, 1, *WHOLE),
            "journal/payload-000001-0001/000000000000-000000000004": 4,
            "journal/payload-000001-0002/000000000000-000000000004": 4,
            "journal/segment-000001/000000000000-000000000009": 9,
        }
    )
    gone = needless_objects(listing, [StoredCutKey(20, 1)], (1, 2))
    assert gone[0] == "cuts/000010/000001/manifest.json" and len(gone) == 4
    assert gone[3] == "journal/payload-000001-0001/000000000000-000000000004"
    assert needless_objects(listing, [], (9, 9)) == [], "without a complete cut everything is needed"
