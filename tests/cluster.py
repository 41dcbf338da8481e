"""What a project adds to run django-redis on a Redis Cluster."""

from typing import Any

from django_redis.pool import ConnectionFactory
from redis.cluster import RedisCluster


class ClusterConnectionFactory(ConnectionFactory):
    """Hands out one cluster client a URL: it has a pool for each node inside."""

    _clients: dict[str, RedisCluster] = {}

    def connect(self, url: str) -> Any:
        if url not in self._clients:
            self._clients[url] = RedisCluster.from_url(url)
        return self._clients[url]

    def disconnect(self, connection: Any) -> None:
        connection.close()
