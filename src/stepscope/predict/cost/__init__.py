"""What steps cost: energy, carbon emissions and the price of the machines."""
