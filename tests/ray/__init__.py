"""Deployments on Ray.  Only what is marked ``ray`` starts a cluster, or needs Ray at all."""
