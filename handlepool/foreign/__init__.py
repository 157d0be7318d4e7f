"""What other libraries need beyond their arrays' protocols; each module is imported when one of its arrays is met, not before."""
