"""The stream of cache events for routers."""
