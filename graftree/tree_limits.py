"""How large a tree may be; apart from `graftree.tree`, so that configuration and clients need no numpy."""

MAX_TREE_NODES = 1024
MAX_TREE_DEPTH = 128
MOST_CHILDREN = 64  # of a node, where a configured shape says how many
