"""Optimisers over plain numpy tables. They choose; `autopar.price.score` adds up."""
