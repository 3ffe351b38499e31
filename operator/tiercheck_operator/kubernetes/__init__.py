"""All that talks to the API server: calls, watches, Events, owned objects, the Lease."""
