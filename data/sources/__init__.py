"""Sources of rows: `Config`, `HUB_IDS` and `build(config, path)`, which returns a `DataSource`.

A hub dataset that `HUB_IDS` lists is read by that source. Those whose records only need a function are in `_table`, the
others are a file each. A user's own file needs no `HUB_IDS`: `--data-path` names it.
"""

from data.read.records import DataSource as DataSource
