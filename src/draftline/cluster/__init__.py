"""Several hosts, on Ray: the same pure core and the same loops as on one host, as actors; see docs/cluster.md."""
