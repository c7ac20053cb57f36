"""Export of spans, configured by OpenTelemetry's own environment variables."""

from __future__ import annotations

import logging
import os
from importlib.metadata import entry_points

logger = logging.getLogger(__name__)

_INSTALL = "pip install opentelemetry-sdk opentelemetry-exporter-otlp"


def export_spans() -> None:
    """Sets up OpenTelemetry if OTEL_TRACES_EXPORTER or OTEL_EXPORTER_OTLP_ENDPOINT is set and nobody has done so.

    If a package is missing, it logs a warning and goes on: work is more important than tracing.
    """
    wanted = os.environ.get("OTEL_TRACES_EXPORTER", "")
    if not wanted and not (
        os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    ):
        return
    names = [name.strip() for name in (wanted or "otlp").split(",") if name.strip() not in ("", "none")]
    try:
        from opentelemetry import trace
        from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        logger.warning("spans cannot be exported (%s); install the packages: %s", error, _INSTALL)
        return
    if not names or not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return  # opentelemetry-instrument, for example, has set it up
    given = OTELResourceDetector().detect()
    provider = TracerProvider(resource=Resource.create({SERVICE_NAME: "custody"}).merge(given))
    exporting = False
    for name in names:
        found = next(iter(entry_points(group="opentelemetry_traces_exporter", name=name)), None)
        if found is None:
            logger.warning("there is no exporter %r for spans; install the packages: %s", name, _INSTALL)
            continue
        provider.add_span_processor(BatchSpanProcessor(found.load()()))
        exporting = True
    if exporting:
        trace.set_tracer_provider(provider)
