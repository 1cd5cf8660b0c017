//! Plans the scratch memory of a list of launches: values that are never alive together may
//! share bytes.

/// Addresses of values are multiples of this.
const ALIGNMENT: u64 = 256;

/// A value in scratch memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Slot(usize);

/// Values of one list of launches, with the launches that touch them.
#[derive(Debug, Default)]
pub(super) struct Slots {
    slots: Vec<Extent>,
}

#[derive(Debug)]
struct Extent {
    bytes: u64,
    /// First and last launch that touches it.
    alive: Option<(usize, usize)>,
}

impl Slots {
    /// A new value.
    pub(super) fn add(&mut self, bytes: u64) -> Slot {
        self.slots.push(Extent { bytes: bytes.next_multiple_of(ALIGNMENT), alive: None });
        Slot(self.slots.len() - 1)
    }

    /// Launch number `launch` touches the value.
    pub(super) fn touch(&mut self, slot: Slot, launch: usize) {
        let alive = &mut self.slots[slot.0].alive;
        let (first, last) = alive.unwrap_or((launch, launch));
        *alive = Some((first.min(launch), last.max(launch)));
    }

    /// Offsets of all values from `base` on, and the end of the memory that they take.
    ///
    /// Largest first, each at the lowest offset where nothing that is alive with it lies.
    pub(super) fn place(&self, base: u64) -> (Vec<u64>, u64) {
        let mut order: Vec<usize> = (0..self.slots.len()).collect();
        order.sort_by_key(|at| (std::cmp::Reverse(self.slots[*at].bytes), *at));
        let mut offsets = vec![base; self.slots.len()];
        let mut placed: Vec<usize> = Vec::new();
        let mut end = base;
        for at in order {
            let slot = &self.slots[at];
            let Some((first, last)) = slot.alive else { continue };
            let mut taken: Vec<(u64, u64)> = placed
                .iter()
                .filter(|other| {
                    self.slots[**other].alive.is_some_and(|(a, b)| a <= last && first <= b)
                })
                .map(|other| (offsets[*other], offsets[*other] + self.slots[*other].bytes))
                .collect();
            taken.sort_unstable();
            let mut offset = base;
            for (start, stop) in taken {
                if offset + slot.bytes <= start {
                    break;
                }
                offset = offset.max(stop);
            }
            offsets[at] = offset;
            end = end.max(offset + slot.bytes);
            placed.push(at);
        }
        (offsets, end)
    }

    /// The offset of a value in what [`Slots::place`] returned.
    pub(super) fn offset(offsets: &[u64], slot: Slot) -> u64 {
        offsets[slot.0]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn values_that_follow_one_another_share_bytes() {
        let mut slots = Slots::default();
        let a = slots.add(1000);
        let b = slots.add(500);
        let c = slots.add(900);
        for (slot, launch) in [(a, 0), (b, 0), (b, 1), (c, 1), (c, 2)] {
            slots.touch(slot, launch);
        }
        let (offsets, end) = slots.place(256);
        assert_eq!(Slots::offset(&offsets, a), Slots::offset(&offsets, c));
        assert_eq!(end, 256 + 1024 + 512);
    }

    proptest! {
        #[test]
        fn values_alive_together_never_overlap(
            values in prop::collection::vec((1u64..5000, 0usize..20, 0usize..6), 1..40)
        ) {
            let mut slots = Slots::default();
            let made: Vec<Slot> = values.iter().map(|(bytes, first, length)| {
                let slot = slots.add(*bytes);
                slots.touch(slot, *first);
                slots.touch(slot, first + length);
                slot
            }).collect();
            let (offsets, end) = slots.place(0);
            for (i, a) in made.iter().enumerate() {
                let (bytes, first, length) = values[i];
                let start = Slots::offset(&offsets, *a);
                prop_assert!(start + bytes <= end);
                for (j, b) in made.iter().enumerate().skip(i + 1) {
                    let (other_bytes, other_first, other_length) = values[j];
                    let together = first <= other_first + other_length
                        && other_first <= first + length;
                    let other = Slots::offset(&offsets, *b);
                    let apart = start + bytes <= other || other + other_bytes <= start;
                    prop_assert!(!together || apart);
                }
            }
        }
    }
}
