"""`kvfleet bench paper`: the tables of the papers that this fleet began from, measured on this machine.

A table is a file of `tables`: what was printed, how it is measured, and what must hold on any machine.
"""
