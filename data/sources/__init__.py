"""One dataset a file: `Config`, and `build(config, place)` that returns a `data.read.records.Source`."""
