"""Campaigns that try to break selectconv: `make soak`; see docs/reliability.md."""
