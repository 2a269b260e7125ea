"""Value objects: shape, layout, split, plan, cluster and measurement; frozen and validated."""
