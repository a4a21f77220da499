"""What people are told: health, protection, possible losses."""
