"""The iteration model adds terms of stages and steps, by one replay of orders, and has their derivatives."""
