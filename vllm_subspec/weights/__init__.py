"""Keeps weights: which are offloaded, their 4-bit substitutes, the draft around these, how an offloaded weight comes back.

In: the loaded target. Out: the draft model; a target that finds its offloaded weights. May touch modules' tables and
weights' places; never a weight's value.
"""
