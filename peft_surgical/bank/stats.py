"""What a bank tells of itself."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from peft_surgical.bank.store import Store


@dataclass(frozen=True)
class BankStats:
    """What a bank has done so far, and holds now.

    Args:
        tasks: Tasks that the bank knows.
        switches: How often another task was made active.
        device_hits: How often a task that was asked for was on the device already.
        host_hits: How often it was brought from host memory.
        disk_hits: How often it was read from its file.
        device_evictions: How often a task had to leave the device.
        host_evictions: How often one had to leave host memory.
        device_bytes: Bytes of tasks on the device now.
        device_peak: The most that there ever were.
        host_bytes: Bytes of tasks in host memory now.
        host_peak: The most that there ever were.
        bytes_read: Bytes read from files.
        bytes_copied: Bytes brought to the device.
        seconds_reading: Time spent reading.
        seconds_copying: Time spent copying and decoding; on a GPU, asking for it.
        seconds_waiting: Time that threads waited for others' forwards and switches, all together.
        failures: How often a task could not be brought.
    """

    tasks: int
    switches: int
    device_hits: int
    host_hits: int
    disk_hits: int
    device_evictions: int
    host_evictions: int
    device_bytes: int
    device_peak: int
    host_bytes: int
    host_peak: int
    bytes_read: int
    bytes_copied: int
    seconds_reading: float
    seconds_copying: float
    seconds_waiting: float
    failures: int

    @classmethod
    def of(cls, store: Store, **others: int | float) -> BankStats:
        """The numbers of a store, with those that it does not know."""
        with store.lock:
            return cls(
                device_evictions=store.device_tier.evictions,
                host_evictions=store.host_tier.evictions,
                device_bytes=store.device_tier.used,
                device_peak=store.device_tier.peak,
                host_bytes=store.host_tier.used,
                host_peak=store.host_tier.peak,
                **asdict(store.traffic),
                **others,  # type: ignore[arg-type]
            )
