import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
from etcd_cluster import EtcdCluster, etcd_binary

from workers.clock import SystemClock
from workers.core.clock import Clock
from workers.directory.base import Directory
from workers.directory.etcd import EtcdDirectory
from workers.directory.etcd_client import Bounds, EtcdClient
from workers.directory.memory import MemoryDirectory, MemoryStore

BOUNDS = Bounds(a_try=0.5, a_call=5.0, silence=3.0, progress=0.5)
numbers = itertools.count()


@pytest.fixture(scope="package")
def etcd() -> Iterator[EtcdCluster]:
    """Three members for all tests here; a test that breaks one mends it."""
    if etcd_binary() is None:
        pytest.skip("etcd is not installed (Debian: apt-get install etcd-server)")
    with EtcdCluster(3) as cluster:
        yield cluster


@pytest.fixture
def cluster_name() -> str:
    """Tests share the store, not their keys."""
    return f"t{next(numbers)}"


Open = Callable[[], Directory]


@pytest.fixture
async def open_etcd(etcd: EtcdCluster, cluster_name: str) -> AsyncIterator[Open]:
    async with contextlib.AsyncExitStack() as stack:

        def make() -> Directory:
            client = EtcdClient(etcd.endpoints, bounds=BOUNDS)
            directory = EtcdDirectory(client, cluster_name, SystemClock())
            stack.push_async_callback(directory.close)
            return directory

        yield make


@pytest.fixture(params=["memory", "etcd"])
def open_directory(request: pytest.FixtureRequest) -> Open:
    """Each call is another process's access to the same directory."""
    if request.param == "etcd":
        opened: Open = request.getfixturevalue("open_etcd")
        return opened
    clock: Clock = SystemClock()
    store = MemoryStore(clock)
    return lambda: MemoryDirectory(store)
