"""Parts that the commands share: configuration, launch, run folder, metrics, trackers, models."""
