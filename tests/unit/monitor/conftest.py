from __future__ import annotations

import pytest
from monitor_fakes import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()
