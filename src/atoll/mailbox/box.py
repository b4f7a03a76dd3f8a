"""The shared memory of one learner and its courier: counters, base versions and fragment buffers, allocated once.

    header      the training process's counters, and what the next courier has to know; one writer for each field
    base        the whole model in fp32: the version last adopted, from which Δ = base − θ is made
    outgoing    slots for copies read off the device, one fragment each: θ, or (placement device) what was encoded of it
    incoming    slots for versions that wait to be adopted
                with share = "moments" both kinds have room for a fragment's moments behind its values
    rests       where the codec needs feedback: slots for what answers leave out (courier/feedback.py); placement device
                keeps them on the device (learner/device_offload.py)

The memory has no name: it is a file descriptor handed to the courier, so nothing is left behind whoever dies. What a
learner at the run's pace needs is reserved at creation: too little memory is an error before training starts, never a
crash in the middle. A slower learner copies several fragments ahead at each boundary: its courier reserves more slots
one by one (`reserve_outgoing`, `reserve_incoming`, `reserve_rest`), and does without where the memory is not there.

Stores of one process may be seen in another order by the other one. So no two fields here have to fit each other while
both processes live: what has to be read whole travels in one frame (channel.py).
"""

from __future__ import annotations

import mmap
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from atoll.numerics.arrays import ByteArray, FloatArray
from atoll.numerics.codec import make_codec
from atoll.numerics.fragments import FragmentPlan
from atoll.numerics.moments import most_bytes
from atoll.protocol import schedule
from atoll.protocol.errors import ConfigError, PeerError
from atoll.protocol.settings import Settings

PAGE = 4096
COUNTS = ("incarnation", "term", "loss_ppb")
"""`loss_ppb`: relative error of a base that was rounded, in parts per billion. Written by the training process."""
PER_FRAGMENT = ("steps", "tokens", "dropped", "missed", "adopted", "base_version", "feedback_t")
RUN_BYTES = 64
SPARE_BYTES = 256 * 2**20
"""Left to everybody else when a learner reserves more slots."""


@dataclass(frozen=True, slots=True)
class BoxLayout:
    """Where everything lies; a function of the plan and the settings alone."""

    fragments: int
    size: int
    largest: int
    flights: int
    feedback: bool = False
    """Whether what answers leave out is kept."""
    on_device: bool = False
    """Placement device: the training process encodes, on its device, and keeps there what answers leave out."""
    moments_bytes: int = 0
    """Room in every slot for the inner optimizer's moments, encoded (numerics/moments.py); 0: they stay local."""
    ranks: bool = False
    """Of one of several ranks: they agree on a boundary's orders at the next one, so more are under way."""

    @staticmethod
    def of(plan: FragmentPlan, settings: Settings, *, on_device: bool = False, ranks: bool = False) -> BoxLayout:
        flights = max(schedule.least_flights(one) for one in settings.in_all_phases)
        feedback = make_codec(settings.codec).needs_feedback
        moments = most_bytes(plan) if settings.shares_moments else 0
        return BoxLayout(len(plan.fragments), plan.size, plan.largest, flights, feedback, on_device, moments, ranks)

    @property
    def first_outgoing(self) -> int:
        """Slots that are reserved from the start: what a learner at the run's pace uses. Where memory is short there
        are no others, often fewer than fragments: then copies give way, and those that are waited for get the next slot
        that is free (courier/slots.py), so that last steps are given all the same."""
        return 2 * self.flights + 3

    @property
    def first_incoming(self) -> int:
        return self.flights + 1

    @property
    def most_outgoing(self) -> int:
        """A copy of every fragment at hand or kept for carry, and one of each on order for the next boundary; for the
        next three, where several ranks agree on them first."""
        return max(self.first_outgoing, (4 if self.ranks else 2) * self.fragments + self.flights)

    @property
    def most_incoming(self) -> int:
        """A version of every fragment waits for the next boundary."""
        return max(self.first_incoming, self.fragments)

    @property
    def first_rests(self) -> int:
        """The feedback of every fragment, and a rest for each round under way at the run's pace."""
        return min(self.most_rests, self.fragments + self.flights + 1)

    @property
    def most_rests(self) -> int:
        return 0 if self.on_device else self.rest_tags

    @property
    def rest_tags(self) -> int:
        """Every fragment's feedback and the rest of an answer; one more of an answer that came to nothing."""
        return 3 * self.fragments if self.feedback else 0

    @property
    def header_bytes(self) -> int:
        cells = len(COUNTS) + len(PER_FRAGMENT) * self.fragments + self.rest_tags
        return _pages(8 * cells + RUN_BYTES)

    @property
    def slot_bytes(self) -> int:
        return max(PAGE, _pages(4 * self.largest + self.moments_bytes))  # a rank may hold nothing

    @property
    def base_bytes(self) -> int:
        return _pages(4 * self.size)

    @property
    def total_bytes(self) -> int:
        """If every slot were in use. Only what is reserved takes memory."""
        return self.slot_start(self.most_outgoing + self.most_incoming + self.most_rests)

    @property
    def first_bytes(self) -> int:
        """Reserved from the start."""
        slots = self.first_outgoing + self.first_incoming + self.first_rests
        return self.header_bytes + self.base_bytes + slots * self.slot_bytes

    def slot_start(self, index: int) -> int:
        return self.header_bytes + self.base_bytes + index * self.slot_bytes


class Mailbox:
    """Views into the shared memory. The training process creates it, the courier attaches to its descriptor."""

    def __init__(self, fd: int, layout: BoxLayout, plan: FragmentPlan) -> None:
        self.fd, self.layout, self.plan = fd, layout, plan
        self._map = mmap.mmap(fd, layout.total_bytes)
        memory = np.frombuffer(self._map, dtype=np.uint8)
        self.memory = memory
        ints = memory[: 8 * len(COUNTS)].view(np.int64)
        at = 8 * len(COUNTS)
        self._counts = ints
        self._fragments: dict[str, npt.NDArray[np.int64]] = {}
        for name in PER_FRAGMENT:
            self._fragments[name] = memory[at : at + 8 * layout.fragments].view(np.int64)
            at += 8 * layout.fragments
        self.rest_tag = memory[at : at + 8 * layout.rest_tags].view(np.int64)
        """Which answer's rest is in a slot, by fragment and step (courier/feedback.py); −1: none, or not whole. Written
        by the courier."""
        at += 8 * layout.rest_tags
        self._run = memory[at : at + RUN_BYTES]

    # ---- making and attaching -----------------------------------------------------------------------------------

    @staticmethod
    def create(plan: FragmentPlan, settings: Settings, *, on_device: bool = False, ranks: bool = False) -> Mailbox:
        layout = BoxLayout.of(plan, settings, on_device=on_device, ranks=ranks)
        need, have = layout.first_bytes, available_bytes()
        if have is not None and need > have:
            raise _too_little(need, have)
        fd = _anonymous_file("atoll-mailbox")
        try:
            os.ftruncate(fd, layout.total_bytes)
            os.posix_fallocate(fd, 0, layout.slot_start(layout.first_outgoing))
            os.posix_fallocate(fd, layout.slot_start(layout.most_outgoing), layout.first_incoming * layout.slot_bytes)
            if layout.first_rests:
                rests = layout.slot_start(layout.most_outgoing + layout.most_incoming)
                os.posix_fallocate(fd, rests, layout.first_rests * layout.slot_bytes)
        except OSError as error:
            os.close(fd)
            raise _too_little(need, have) from error
        box = Mailbox(fd, layout, plan)
        box.steps[:] = box.tokens[:] = box.dropped[:] = box.missed[:] = 0
        box.adopted[:] = box.base_version[:] = box.feedback_t[:] = -1
        box.rest_tag[:] = -1
        return box

    def reserve_outgoing(self, slot: int) -> bool:
        """One more slot than there were; False where its memory cannot be had."""
        return slot < self.layout.most_outgoing and self._reserve(slot)

    def reserve_incoming(self, slot: int) -> bool:
        return slot < self.layout.most_incoming and self._reserve(self.layout.most_outgoing + slot)

    def reserve_rest(self, slot: int) -> bool:
        return slot < self.layout.most_rests and self._reserve(self._rest_index(slot))

    def _reserve(self, index: int) -> bool:
        if not can_spare(self.layout.slot_bytes):
            return False  # asked for first: a control group kills where the system only refuses
        try:
            os.posix_fallocate(self.fd, self.layout.slot_start(index), self.layout.slot_bytes)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Forget the descriptor; the memory itself goes with the last view of it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    # ---- the header ---------------------------------------------------------------------------------------------

    @property
    def steps(self) -> npt.NDArray[np.int64]:
        """Steps since the last adoption, per fragment. Written by the training process."""
        return self._fragments["steps"]

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        """Tokens since the last adoption, per fragment. Written by the training process."""
        return self._fragments["tokens"]

    @property
    def dropped(self) -> npt.NDArray[np.int64]:
        """Tokens that adoptions overwrote and no version contains, per fragment. Written by the training process."""
        return self._fragments["dropped"]

    @property
    def missed(self) -> npt.NDArray[np.int64]:
        """Of `dropped`: overwritten by versions that held none of its steps. Written by the training process."""
        return self._fragments["missed"]

    @property
    def adopted(self) -> npt.NDArray[np.int64]:
        """The version in the model, per fragment. Written by the training process."""
        return self._fragments["adopted"]

    @property
    def base_version(self) -> npt.NDArray[np.int64]:
        """The version in the base, per fragment; −1 while it is being written. Written by the courier."""
        return self._fragments["base_version"]

    @property
    def feedback_t(self) -> npt.NDArray[np.int64]:
        """The step of the copy whose rest is the feedback, per fragment; −1: there is none. Written by the courier."""
        return self._fragments["feedback_t"]

    def tag_rest(self, fragment: int, t: int) -> int:
        """What `rest_tag` says of the rest that the copy after step `t` left."""
        return t * self.layout.fragments + fragment

    def find_rest(self, fragment: int, t: int) -> int | None:
        """The place of that rest; None: there is none."""
        found = np.flatnonzero(self.rest_tag == self.tag_rest(fragment, t))
        return int(found[0]) if found.size else None

    def feedback_for(self, fragment: int, t: int) -> int:
        """The step of the copy whose rest goes with an answer of the copy after step `t`; −1: none does. If that very
        copy was merged, there is nothing new in it: it can only be for a probe, and goes alone."""
        at = int(self.feedback_t[fragment])
        return at if at not in (-1, t) and self.find_rest(fragment, at) is not None else -1

    def count(self, name: str) -> int:
        return int(self._counts[COUNTS.index(name)])

    def set_count(self, name: str, value: int) -> None:
        self._counts[COUNTS.index(name)] = value

    @property
    def run(self) -> str:
        """The run that the versions belong to. Written by the courier."""
        return bytes(self._run).rstrip(b"\0").decode()

    @run.setter
    def run(self, name: str) -> None:
        data = name.encode()
        assert len(data) <= RUN_BYTES
        self._run[:] = np.frombuffer(data.ljust(RUN_BYTES, b"\0"), dtype=np.uint8)

    # ---- the buffers --------------------------------------------------------------------------------------------

    def whole_base(self) -> FloatArray:
        """Of every fragment, one behind the other."""
        return self._floats(self.layout.header_bytes, self.layout.size)

    def base(self, fragment: int) -> FloatArray:
        return self._floats(self._base_start(fragment), self.plan.fragments[fragment].size)

    def write_base(self, fragment: int, values: FloatArray, at: int = 0) -> None:
        """These are the base from value `at` on. For pages that this process has not touched yet: written through the
        descriptor they cost a third of what they do one page fault after the other."""
        assert 0 <= at <= self.plan.fragments[fragment].size - values.size, "values of this fragment"
        left, offset = values.reshape(-1).view(np.uint8).data, self._base_start(fragment) + 4 * at
        while left:
            written = os.pwrite(self.fd, left, offset)
            left, offset = left[written:], offset + written

    def _base_start(self, fragment: int) -> int:
        return self.layout.header_bytes + 4 * self.plan.starts[fragment]

    def outgoing(self, slot: int, fragment: int) -> FloatArray:
        return self._slot(slot, fragment)

    def body(self, slot: int, size: int) -> ByteArray:
        """What was encoded of a copy (placement device). No codec makes more than 4 bytes of a value."""
        start = self.layout.slot_start(slot)
        return self.memory[start : start + size]

    def incoming(self, slot: int, fragment: int) -> FloatArray:
        return self._slot(self.layout.most_outgoing + slot, fragment)

    def outgoing_moments(self, slot: int) -> ByteArray:
        """The room behind a copy; what is in it begins with its own length (`read_moments`)."""
        return self._moments(slot)

    def incoming_moments(self, slot: int) -> ByteArray:
        return self._moments(self.layout.most_outgoing + slot)

    def _moments(self, index: int) -> ByteArray:
        start = self.layout.slot_start(index) + 4 * self.layout.largest
        return self.memory[start : start + self.layout.moments_bytes]

    def rest(self, slot: int, fragment: int) -> FloatArray:
        return self._slot(self._rest_index(slot), fragment)

    def _rest_index(self, slot: int) -> int:
        return self.layout.most_outgoing + self.layout.most_incoming + slot

    def slots_memory(self, first: int, count: int) -> npt.NDArray[np.uint8]:
        """The bytes of these slots, for page-locking; the incoming ones come behind every outgoing one."""
        return self.memory[self.layout.slot_start(first) : self.layout.slot_start(first + count)]

    def _slot(self, index: int, fragment: int) -> FloatArray:
        return self._floats(self.layout.slot_start(index), self.plan.fragments[fragment].size)

    def _floats(self, start: int, size: int) -> FloatArray:
        return self.memory[start : start + 4 * size].view(np.float32)


def serves(made_for: Settings, settings: Settings) -> bool:
    """Return whether shared memory made for some settings serves others of the same plan.

    H, τ, adoption and phases may change during a run, and slots are reserved by need. Only a run that may carry needs
    memory made for one: with placement device, the copies to subtract are on the device. A run that rounds version 0
    needs a base that was rounded when it was written."""
    same = [(one.codec, one.version_codec, one.shares_moments, one.rounds_initial) for one in (made_for, settings)]
    return same[0] == same[1] and (made_for.may_carry or not settings.may_carry)


def available_bytes() -> int | None:
    """Memory that can be had now, by the system and by the control group; None where neither tells."""
    known = [value for value in (_meminfo(), _cgroup()) if value is not None]
    return min(known) if known else None


def can_spare(size: int) -> bool:
    """Whether so many more bytes leave enough to everybody else."""
    have = available_bytes()
    return have is None or size + SPARE_BYTES <= have


def _meminfo() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None


def _cgroup() -> int | None:
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(0, int(limit) - used)


def _too_little(need: int, have: int | None) -> ConfigError:
    there = "" if have is None else f" and {have / 2**20:,.0f} MiB are free"
    return ConfigError(
        f"the shared buffers need {need / 2**20:,.0f} MiB of memory{there}: "
        f"use a smaller model, more fragments or fewer learners on this machine"
    )


def _anonymous_file(name: str) -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


# ---- memory for a learner's state: one process fills it, another reads it -------------------------------------------


def reserve(size: int, what: str) -> int:
    """A descriptor of so many bytes; PeerError where they cannot be had."""
    have = available_bytes()
    if have is not None and size > have:
        raise PeerError(f"{what} takes {size / 2**20:,.0f} MiB of memory and {have / 2**20:,.0f} MiB are free")
    fd = _anonymous_file("atoll-state")
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        os.close(fd)
        raise PeerError(f"{what} takes {size / 2**20:,.0f} MiB of memory: {error.strerror}") from error
    return fd


def mapped(fd: int, size: int, *, write: bool = False) -> memoryview:
    """The memory itself. It stays without its descriptor, until the last view of it is gone."""
    if os.fstat(fd).st_size < size:
        raise PeerError(f"a memory of {os.fstat(fd).st_size} bytes came for {size}")
    return memoryview(mmap.mmap(fd, size, prot=mmap.PROT_READ | (mmap.PROT_WRITE if write else 0)))
