"""The iteration model: terms of stages and steps, one replay of orders, their sum and its derivatives."""
