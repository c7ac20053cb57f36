"""Where the spans of a process go: what OpenTelemetry's own environment variables say."""

from __future__ import annotations

import logging
import os
from importlib.metadata import entry_points

logger = logging.getLogger(__name__)

_INSTALL = "pip install opentelemetry-sdk opentelemetry-exporter-otlp"


def export_spans() -> None:
    """Sets up OpenTelemetry if OTEL_TRACES_EXPORTER or OTEL_EXPORTER_OTLP_ENDPOINT asks for it, and nobody has yet.

    What is missing for it is told, and nothing else comes of it: the work is more than the watching.
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
        logger.warning("spans are asked for, but cannot be made (%s): %s", error, _INSTALL)
        return
    if not names or not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return  # opentelemetry-instrument was there before us
    given = OTELResourceDetector().detect()
    provider = TracerProvider(resource=Resource.create({SERVICE_NAME: "custody"}).merge(given))
    exporting = False
    for name in names:
        found = next(iter(entry_points(group="opentelemetry_traces_exporter", name=name)), None)
        if found is None:
            logger.warning("there is no exporter %r for spans: %s", name, _INSTALL)
            continue
        provider.add_span_processor(BatchSpanProcessor(found.load()()))
        exporting = True
    if exporting:
        trace.set_tracer_provider(provider)
