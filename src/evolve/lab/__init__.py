"""The instruments: probes, tasks, training, accounting and plotting, shared by every rung."""
