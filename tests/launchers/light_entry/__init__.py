"""An adapter's entry that adapts nothing, so that trial servers are tested without a framework."""
