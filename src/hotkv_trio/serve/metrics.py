"""A shard's figures for Prometheus, and whether it is alive and ready, over HTTP: needs the extra ``metrics``."""

from hotkv_trio.serve._metrics import MetricsServer, ShardCollector

__all__ = ["MetricsServer", "ShardCollector"]
