"""What every process needs: its settings' file, its folder, its log, its end, its numbers and its wire."""
