"""Health checks: active probes, outlier ejection, throttled starts."""
