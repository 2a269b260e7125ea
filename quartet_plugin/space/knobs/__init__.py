"""The tuned quantities, one file each; `registry` lists them."""
