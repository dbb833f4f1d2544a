"""How long the recorded steps would take on hardware that the user does not have.

`operations` describes what device work does, free of any device; `operation_times` says how long that takes on one.
"""
