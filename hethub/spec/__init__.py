"""What every part of hethub speaks: validated, frozen descriptions and the pure arithmetic on them. Never imports
torch."""
