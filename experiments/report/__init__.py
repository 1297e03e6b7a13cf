"""What results say, and the pages that show them."""
