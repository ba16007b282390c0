"""Several emulated workers of one process, with a pool client each where an agent is given."""

from collections.abc import Mapping

from workers.engines.emulated.api import Api
from workers.engines.emulated.http import Server
from workers.engines.emulated.pool import AgentPool
from workers.engines.emulated.text import Prompts
from workers.engines.emulated.worker import EngineConfig, Worker, WorkerSpec


class Fleet:
    """`start`, then `urls`; `stop` ends everything it started. One event loop only."""

    def __init__(
        self,
        specs: list[WorkerSpec],
        config: EngineConfig,
        agent_socket: str | None = None,
        weights_version: str = "emulated",
        agents: Mapping[str, str] | None = None,
    ) -> None:
        """`agent_socket` for all workers, but for those that `agents` gives another one."""
        prompts = Prompts(config.model_path)
        sockets = {
            spec.worker_id: (agents or {}).get(spec.worker_id, agent_socket) for spec in specs
        }
        self._pools = {
            spec.worker_id: AgentPool(address, spec, config, weights_version)
            for spec in specs
            if (address := sockets[spec.worker_id]) is not None
        }
        self.apis = {
            spec.worker_id: Api(Worker(spec, config, self._pools.get(spec.worker_id)), prompts)
            for spec in specs
        }
        self._servers: dict[str, Server] = {}
        self._host = "127.0.0.1"

    async def start(self, host: str = "127.0.0.1") -> None:
        self._host = host
        for worker_id, api in self.apis.items():
            server = Server(api.handle)
            await server.start(host, api.worker.spec.port)
            self._servers[worker_id] = server
        for pool in self._pools.values():
            await pool.connect()

    async def stop(self) -> None:
        for server in self._servers.values():
            await server.stop()
        for pool in self._pools.values():
            await pool.close()

    async def stop_worker(self, worker_id: str) -> None:
        """End one worker as if its process had died."""
        await self._servers[worker_id].stop()

    async def restart_worker(self, worker_id: str) -> None:
        """Bring a stopped worker back on its old port, with an empty device cache."""
        port = self._servers[worker_id].port
        api = self.apis[worker_id]
        api.worker.device.clear()
        server = Server(api.handle)
        await server.start(self._host, port)
        self._servers[worker_id] = server

    @property
    def urls(self) -> dict[str, str]:
        return {name: f"http://{self._host}:{s.port}" for name, s in self._servers.items()}
