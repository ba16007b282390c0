"""The doctor's REST calls as values, for `Client.send`."""

from __future__ import annotations

from controlplane.calls import API, Call
from controlplane.doctor.schemas import DoctorReport, DoctorRun


def last() -> Call[DoctorReport]:
    return Call("GET", f"{API}/doctor", DoctorReport)


def run(body: DoctorRun) -> Call[DoctorReport]:
    return Call("POST", f"{API}/doctor", DoctorReport, body=body)
