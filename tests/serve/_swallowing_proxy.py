"""A way to a server that can stop forwarding: no FIN, no reset, and every system on it still answers."""

from __future__ import annotations

import trio


class SwallowingProxy:
    """Forwards TCP, until ``cut`` is set: from then on it swallows everything and says nothing."""

    def __init__(self, target: str) -> None:
        self.host, _, self.port = target.partition(":")
        self.cut = False

    async def serve(self, *, task_status: trio.TaskStatus[str]) -> None:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1", backlog=512)
        task_status.started(f"127.0.0.1:{listeners[0].socket.getsockname()[1]}")
        await trio.serve_listeners(self._forward, listeners)

    async def _forward(self, client: trio.SocketStream) -> None:
        async with (
            client,
            await trio.open_tcp_stream(self.host, int(self.port)) as server,
            trio.open_nursery() as nursery,
        ):
            for source, target in ((client, server), (server, client)):
                nursery.start_soon(self._pump, source, target, nursery.cancel_scope)

    async def _pump(self, source: trio.SocketStream, target: trio.SocketStream, scope: trio.CancelScope) -> None:
        try:
            async for data in source:
                if not self.cut:
                    await target.send_all(data)
        except trio.BrokenResourceError:
            pass
        if self.cut:
            await trio.sleep_forever()
        scope.cancel()
