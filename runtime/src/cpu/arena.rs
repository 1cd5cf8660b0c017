//! Where the values of a method lie in one block of memory.

/// A value's size and the nodes between which it must be kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Lifetime {
    /// Numbers.
    pub(crate) size: u64,
    /// Index of the node that writes it.
    pub(crate) first: usize,
    /// Index of the last node that reads it; it must not be overwritten by that node.
    pub(crate) last: usize,
}

/// Numbers that every value starts on a multiple of: 64 bytes.
const ALIGNMENT: u64 = 16;

/// Offsets of all values, and the length of the block; values whose lifetimes meet do not
/// overlap. `None` if the length exceeds 64 bits.
///
/// Lifetimes must be sorted by `first`. Each value goes to the lowest gap that it fits in when it
/// is written.
pub(crate) fn place(lifetimes: &[Lifetime]) -> Option<(Vec<u64>, u64)> {
    let mut offsets = Vec::with_capacity(lifetimes.len());
    // Values that are still needed: (offset, end, last node), sorted by offset.
    let mut live: Vec<(u64, u64, usize)> = Vec::new();
    let mut length = 0;
    for value in lifetimes {
        live.retain(|(_, _, last)| *last >= value.first);
        let size = value.size.checked_next_multiple_of(ALIGNMENT)?;
        let mut start = 0;
        let mut at = 0;
        for (offset, end, _) in &live {
            if offset - start >= size {
                break;
            }
            start = *end;
            at += 1;
        }
        let end = start.checked_add(size)?;
        live.insert(at, (start, end, value.last.max(value.first)));
        offsets.push(start);
        length = length.max(end);
    }
    Some((offsets, length))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Lets each value be written with its own number at its first node, and its memory be
    /// poisoned after its last; whatever is read in between must be that number.
    fn simulate(lifetimes: &[Lifetime], offsets: &[u64], length: u64) -> Result<(), String> {
        let mut memory = vec![u64::MAX; length as usize];
        let end = lifetimes.iter().map(|l| l.last).max().unwrap_or(0);
        for node in 0..=end {
            let at = |id: usize| {
                let start = offsets[id] as usize;
                start..start + lifetimes[id].size as usize
            };
            for (id, _) in lifetimes.iter().enumerate().filter(|(_, l)| l.first == node) {
                memory[at(id)].fill(id as u64);
            }
            for (id, life) in lifetimes.iter().enumerate() {
                if (life.first..=life.last).contains(&node)
                    && memory[at(id)].iter().any(|x| *x != id as u64)
                {
                    return Err(format!("value {id} is overwritten at node {node}"));
                }
            }
            for (id, _) in lifetimes.iter().enumerate().filter(|(_, l)| l.last == node) {
                memory[at(id)].fill(u64::MAX);
            }
        }
        Ok(())
    }

    proptest! {
        #[test]
        fn no_value_is_overwritten_while_it_is_needed(
            seeds in proptest::collection::vec((1u64..100, 0usize..30, 0usize..8), 1..60)
        ) {
            let mut lifetimes: Vec<Lifetime> = seeds
                .into_iter()
                .map(|(size, first, length)| Lifetime { size, first, last: first + length })
                .collect();
            lifetimes.sort_by_key(|l| l.first);
            let (offsets, length) = place(&lifetimes).expect("small");
            prop_assert_eq!(simulate(&lifetimes, &offsets, length), Ok(()));
        }
    }

    #[test]
    fn memory_of_a_chain_is_used_again() {
        let chain: Vec<Lifetime> =
            (0..100).map(|i| Lifetime { size: 16, first: i, last: i + 1 }).collect();
        assert_eq!(place(&chain).map(|(_, length)| length), Some(32));
    }

    #[test]
    fn sizes_that_overflow_are_refused() {
        let huge = Lifetime { size: u64::MAX / 2, first: 0, last: 1 };
        assert_eq!(place(&[huge; 3]), None);
    }
}
