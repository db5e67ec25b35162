"""Serves the newest numbers of a run to Prometheus, as `slipstream_produced_success{run="demo"}` and so on."""

import re
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.metrics import Sample


def exported_name(name: str) -> str:
    """The name of the metric `name` in Prometheus, which allows letters, digits and underscores."""
    return "slipstream_" + re.sub(r"\W", "_", name, flags=re.ASCII)


class PrometheusTracker(Collector):
    """An HTTP server with the newest value of every metric."""

    def __init__(self, name: str, *, host: str, port: int) -> None:
        """Serve the run `name` at `host` and `port`. Raises ConfigError if the port is taken."""
        self.run = name
        self._newest: dict[str, float] = {}
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            raise ConfigError(f"cannot serve on {host}:{port}: {error}; choose another --port or --host") from error
        address, bound_port = self._server.server_address[:2]
        self.place = f"http://{address!s}:{bound_port}/metrics"

    def log(self, record: Mapping[str, float]) -> None:
        self._newest = self._newest | dict(record)  # replaced, not changed: the server's threads read it meanwhile

    def log_samples(self, samples: Sequence[Sample]) -> None:
        """Nothing: Prometheus stores numbers."""

    def collect(self) -> Iterator[GaugeMetricFamily]:
        for name, value in self._newest.items():
            gauge = GaugeMetricFamily(exported_name(name), f"{name} of the newest record", labels=["run"])
            gauge.add_metric([self.run], value)
            yield gauge

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
