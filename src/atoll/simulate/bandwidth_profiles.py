"""Settings of the bandwidth calculator by name, and where each of them is from."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.protocol.errors import ConfigError
from atoll.simulate.bandwidth import VERSIONS, Codec, Spread


@dataclass(frozen=True, slots=True)
class Profile:
    run: Spread
    codecs: tuple[Codec, ...]
    """Of the fragments, where nobody says."""
    provenance: str


PROFILES = {
    "paper-table": Profile(
        Spread(sync_every=100, fragments=18, overlap=2),
        ("bf16", "int4"),
        "H = 100, Pτ = 36 and 60 layers fit the published table (arXiv 2604.21428): a fit, not the authors' values.",
    ),
    "paper": Profile(
        Spread(sync_every=24, fragments=24, overlap=2),
        ("bf16", "int4"),
        "H = P = 24 and τ = 2 as in the paper's text (arXiv 2604.21428); its table comes from other settings, "
        "see paper-table. 60 layers are a fit, not the authors' value.",
    ),
    "atoll": Profile(
        Spread(sync_every=24, fragments=24, overlap=2, topology="star", down=VERSIONS),
        ("bf16",),
        "What this software does by default: a star through the syncer, H = P = 24, τ = 2; contributions go up as the "
        "codec says, versions come down in fp32. 60 layers for data-parallel are a fit to the published table, not the "
        "authors' value.",
    ),
}


def profile(name: str) -> Profile:
    if name not in PROFILES:
        raise ConfigError(f"there is no profile {name!r}: take {', '.join(PROFILES)}")
    return PROFILES[name]
