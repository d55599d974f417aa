import os
import pickle

import pytest
import torch
from hypothesis import HealthCheck, settings

from petra import Model, TensorSpec
from petra.model import BlockProfile

# The same examples at each run of the tests; `pytest --hypothesis-profile=long` draws many new ones.
_always = settings(deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
settings.register_profile("short", _always, max_examples=100, derandomize=True)
settings.register_profile("long", _always, max_examples=1250)
settings.load_profile("short")

# Results are bit-for-bit reproducible for a fixed number of threads, and tests share few cores.
os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start
torch.set_num_threads(1)


_profiles: dict[bytes, tuple[BlockProfile, ...]] = {}


@pytest.fixture
def shared_profiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Profile equal models once. Tests of configurations plan the same few models hundreds of times."""
    profile = Model.profile

    def shared(model: Model, inputs: TensorSpec) -> tuple[BlockProfile, ...]:
        try:
            key = pickle.dumps((model, inputs))
        except (pickle.PicklingError, AttributeError, TypeError):  # a class or function that a test defines locally
            return profile(model, inputs)
        if key not in _profiles:
            _profiles[key] = profile(model, inputs)
        return _profiles[key]

    monkeypatch.setattr(Model, "profile", shared)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Restore the number of threads, which an earlier test may have changed."""
    torch.set_num_threads(1)
