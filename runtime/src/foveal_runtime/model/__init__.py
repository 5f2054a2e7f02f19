"""The only torch in the engine: loading, paged attention, encoders, sampling, profiling."""
