"""What a rate limiter costs: ours, the others and the bare store, side by side in one run."""
