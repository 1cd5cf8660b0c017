//! Finding out that an answer will not end by itself.

/// Longest period in tokens that is looked for.
const LONGEST_PERIOD: usize = 256;
/// Tokens that have to repeat what stood one period before.
const REPEATED: usize = 96;
/// Periods that have to follow one another at least.
const TIMES: usize = 4;

/// Notices when the last tokens are one stretch again and again.
#[derive(Debug, Default)]
pub(super) struct Repetition {
    ids: Vec<u32>,
    /// By period, from 1: how many of the last tokens equal the one a period before.
    equal: Vec<usize>,
}

impl Repetition {
    /// Takes a token and says whether the answer runs in circles: the last stretch of up to 256
    /// tokens stood at least four times in a row, and filled at least 96 tokens.
    pub(super) fn push(&mut self, id: u32) -> bool {
        self.equal.resize(LONGEST_PERIOD, 0);
        let mut found = false;
        for (at, equal) in self.equal.iter_mut().enumerate() {
            let period = at + 1;
            let before = self.ids.len().checked_sub(period).map(|at| self.ids[at]);
            *equal = if before == Some(id) { *equal + 1 } else { 0 };
            found |= *equal >= REPEATED.max(period * (TIMES - 1));
        }
        self.ids.push(id);
        found
    }
}

#[cfg(test)]
mod tests {
    use super::Repetition;

    /// How many tokens were taken until a loop was noticed.
    fn noticed(ids: impl IntoIterator<Item = u32>) -> Option<usize> {
        let mut repetition = Repetition::default();
        ids.into_iter().position(|id| repetition.push(id)).map(|at| at + 1)
    }

    #[test]
    fn loops_of_any_period_are_noticed() {
        for period in [1usize, 2, 7, 50, 200, 256] {
            let start = 1000..1020;
            let circle = (0..period as u32).cycle().take(2000);
            let expected = 20 + period + 96.max(3 * period);
            assert_eq!(noticed(start.chain(circle)), Some(expected), "{period}");
        }
    }

    #[test]
    fn what_goes_on_is_no_loop() {
        assert_eq!(noticed(0..5000), None);
        // A table: the same row with another number in it.
        assert_eq!(noticed((0..5000).map(|at| if at % 10 == 0 { at } else { at % 10 })), None);
        // A list of three equal paragraphs.
        assert_eq!(noticed((0..3).flat_map(|_| 0..90).chain(500..600)), None);
    }
}
