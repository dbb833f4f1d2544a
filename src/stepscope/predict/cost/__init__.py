"""What steps cost: the energy they use, the carbon that emits, and the price of the machines they run on."""
