"""The lab: many trials on one machine, journalled, and tables from the journal."""
