"""What clients ask for, made into work, and the answers that they get for it; whatever door they came through."""
