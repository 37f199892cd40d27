"""Channel selectivity in other people's trainers; each file needs the extra of its name."""
