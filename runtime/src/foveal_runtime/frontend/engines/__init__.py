"""Engine clients: links, routing, requests in flight, migration."""
